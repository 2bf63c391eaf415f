"""What pages are made of: charts, timelines, lines, labels."""
