import subprocess
import sys

import pytest
from script_helpers import SCRIPTS


@pytest.mark.grid
@pytest.mark.parametrize("flags, found", [(["--check-shapes"], ["TypeCheckError"]), ([], [])])
def test_shapes_are_checked_where_that_is_asked_for(flags, found):
    code = f"""
import sys
sys.path.insert(0, {str(SCRIPTS)!r})
from support import environment
environment.prepare(sys.argv)
from eqformer import nn
try:
    nn.RMSNorm("embed", embed=8, eps="small")
except Exception as error:
    print(type(error).__name__)
"""
    done = subprocess.run([sys.executable, "-c", code, *flags], capture_output=True, text=True)
    assert done.stdout.split() == found, done.stderr
