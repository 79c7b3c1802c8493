"""A MaxText that computes nothing, for rehearsing faults: fast, and the same as the real one in all that is seen of it.

Same modules, arguments, folders, log lines and exit codes; no numbers worth anything. Accuracies follow from how often
the checkpoint that is evaluated was trained, so that training that was lost or made twice shows.
"""
