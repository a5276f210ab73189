"""What any room may use: checks of arguments, errors, safe text, files, folders, progress."""
