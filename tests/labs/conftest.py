"""The labs are scripts: their folder is on the path as it is when one is run."""

import sys
from pathlib import Path

DEMOS = Path(__file__).parent.parent.parent / "demos"
sys.path += [str(DEMOS / "labs"), str(DEMOS)]
