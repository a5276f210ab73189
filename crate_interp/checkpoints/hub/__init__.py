"""The table of public files, and the checked download of these files."""
