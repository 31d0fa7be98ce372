"""Launch settings: from the launch file, flags, the environment and files of other launchers."""
