"""Launch settings: one row each (`setting_table`), which `resolution` finds in flags, environment and files."""
