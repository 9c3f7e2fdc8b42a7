"""More machines than one, by Ray: environments and whole slots in actors, placed by resources.

Ray is the extra ``ray``; it is imported when ``RolloutConfig.worker`` is "ray".
"""
