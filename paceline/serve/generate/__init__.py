"""From a checked request to the engine, and from its outputs to the bodies and events of an answer."""
