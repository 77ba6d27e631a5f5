"""Fills a training state from a version: which version, what is read from where, and where it goes.

The call path from ``Checkpointer.restore`` to the elements of a tensor in ``into``::

    agreed.restore_agreed            choose a version with the other ranks, fall back past damaged ones
      planner.plan_restore           compare ``into`` with the version's manifest
        save.state_tree.flatten      ``into`` as a list of leaves (_walk)
        save.shards.shard_of         the part of each tensor that this rank has, as words in its memory (_torch_shard)
        fill.Fill.add                one request for each tensor
        storage PackReader.runs      the ranges of packs to fetch for the requests
      fill.Fill.run                  (``RestorePlan.execute``)
        storage PackReader.complete  fetch, check and decode into the memory of the tensors (_decode)
"""
