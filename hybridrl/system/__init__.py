"""The machine under a run, on the ground floor: what a process can learn of it and how it ends.

Start from `read_node_info` (`node_info.py`: hardware, limits and versions of a node), `join_group`
(`rendezvous.py`: how ranks find each other) and `signals.install` (`signals.py`: SIGINT, SIGTERM
and SIGUSR1). torch is imported lazily.
"""
