"""The table of public files, and their download, checked."""
