"""Reports of a run: step reports and traces, monitors of the engine, trackers of a script."""
