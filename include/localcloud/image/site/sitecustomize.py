"""Python imports this at start-up on a VM of the local cloud: MaxText then runs the toy model on a CPU."""

import localcloud_maxtext

localcloud_maxtext.install()
