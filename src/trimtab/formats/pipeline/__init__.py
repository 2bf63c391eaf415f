"""Files of pipeline partitions: PipeEdge's, layer profiles, and splits for engines and trainers."""
