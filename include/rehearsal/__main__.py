"""`python -m rehearsal`."""

from rehearsal.cli import main

main()
