"""Everything that knows Flower: the app, its messages and chunks, collector, site node, gateway, TLS, deployment folders."""
