"""The lowest layer: facts of a node, rendezvous of ranks, memory and signals.

Start from `read_node_info` (`node_info.py`: hardware, limits and versions of a node), `join_group`
(`rendezvous.py`: process groups) and `signals.install` (`signals.py`: SIGINT, SIGTERM and SIGUSR1).
torch is imported lazily.
"""
