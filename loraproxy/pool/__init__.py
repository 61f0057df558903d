"""Workers' states and the leases that requests take on them."""
