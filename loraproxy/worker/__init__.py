"""What runs inside the embedded worker: its HTTP application and the engine."""
