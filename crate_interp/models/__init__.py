"""The equations of the CRATE family with HookPoints at every step."""
