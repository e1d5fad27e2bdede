"""What runs, in what order: the flows, the command line and the presets."""
