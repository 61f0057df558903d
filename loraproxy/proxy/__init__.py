"""The public HTTP application: routes by API family, forwarding, authentication."""
