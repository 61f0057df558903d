"""How to start, reach and speak to each kind of worker."""
