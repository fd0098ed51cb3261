"""BYTES between nodes: messages, codec, handshake without I/O, encrypted channels, link shaping and faults."""
