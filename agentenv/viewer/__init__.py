"""`agentenv view RUN`: the episodes of a run directory as a local web page that follows the run.

Needs the extra `view`. Nothing here writes to the run directory, and nothing is fetched from the network.
"""
