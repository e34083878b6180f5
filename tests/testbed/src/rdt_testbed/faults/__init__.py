"""Fault injection: whole sync groups of real processes, in which any process can fail at any point of a sync.

A `World` is one coordinator, a few source ranks and replicas, each a process of its own, forked from one that has imported
what they need. Real shared memory moves real bytes; only Ray is replaced, by Unix sockets with the same semantics. Faults
are injected from outside: the product has no hooks. `campaign` draws faults from a seed, checks after each that nobody
served wrong weights or waited for ever, and heals the group. Not for NIXL, engines or GPUs.
"""
