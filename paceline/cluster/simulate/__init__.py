"""A cluster without machines: discrete events, measured pass costs, and the routers and policies of the real one."""
