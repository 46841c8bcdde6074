"""Connections, bodies, keys, limits and routes: everything between a socket and a checked request."""
