"""What a run reports about itself: step reports, monitors of the engine, trackers of a script."""
