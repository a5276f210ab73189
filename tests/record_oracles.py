"""Computes the oracles of the measures in 50 digits and writes them into tests/oracles.

`make oracles` runs it. Look at the difference before you commit it: a number that moves without a
change of its formula is an error.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from oracle_cases import TOKENS
from oracles import write

if __name__ == "__main__":
    for kind in TOKENS:
        print(write(kind))
