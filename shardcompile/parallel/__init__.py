"""What users call beside the tensor: routing, gather plans, neighbors, halos, documents, context parallelism,
replicas.
"""
