"""Python imports this at start-up on a VM of the stand-in image: the export can then be held up, as a full network would."""

import sys

if "--manifest" in sys.orig_argv:
    from localcloud_stand_in import control

    control.reach("export")
