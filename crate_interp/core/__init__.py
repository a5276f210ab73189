"""Helpers for every room: argument checks, errors, safe text, files, folders and progress."""
