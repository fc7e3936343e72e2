"""UMA as a backend worker of NVIDIA Dynamo 1.6: `dynamo.common.backend`'s contract over an `Engine`.

Only `worker` imports Dynamo; everything else here is tested without it.
"""
