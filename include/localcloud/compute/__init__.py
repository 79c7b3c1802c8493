"""The Compute Engine API of the local cloud.

::

    app          HTTP: routes, batch requests, the control interface below /_localcloud
    service      one handler per API method
    lifecycle    what happens to an instance: queued, booted, preempted, expired, deleted
    operations   the long-running operations that clients poll
    faults       orders to misbehave
    state        what survives a restart (SQLite)
    discovery    Google's own description of the API: methods, parameters, schemas
    validation   a JSON body against a schema of that description
    placement    the rules that Google applies beyond the schema
    catalog      the zones, machine types, images, networks and reservations that exist
    filters      the list filter language
"""
