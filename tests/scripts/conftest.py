"""The scripts' own folder is importable, as it is for a script that runs."""

import sys

from script_helpers import SCRIPTS


sys.path.insert(0, str(SCRIPTS))
