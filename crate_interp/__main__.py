"""python -m crate_interp is crate-interp."""

from crate_interp.cli import main

main()
