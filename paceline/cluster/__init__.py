"""Many workers behind one server: routing, prefill apart from decoding, failover, and a simulator of it all.

Disaggregation is a remote fill of the prefix cache: a prefill worker computes full KV blocks and never samples, blocks
travel under their hashes, and the decode worker computes the last prompt rows itself and draws every token. So a failed
transfer is a cache miss and not an error, and the text is the one that a single engine gives. See docs/cluster.md.
"""
