"""The commands that work on files: inspect, convert, merge."""
