"""The interface for training processes: ``Checkpointer``, its options, and the outcome of a save.

The call path from ``save`` to the bytes that the node worker gets; the staging thread begins at ``Staging._stage``::

    orchestrator.client.checkpointer.Checkpointer.save
      state.planner.plan_save                                 what this rank stores
        state.tree_cache.StateCache.leaves                    the state as a list of leaves
        state.shard_cache.ShardCache.look                     the part of each tensor that this rank has
        state.write_check.copy_unguarded                      copy what may change at once
      orchestrator.client.saves_in_flight.SavesInFlight.wait_for_oldest
      orchestrator.client.saves_in_flight.SavesInFlight.begin     make the ``SaveOutcome``
      orchestrator.client.node_connection.NodeConnection.staging  connect to the node worker, once
      workers.staging.client.Staging.submit                   give the order to the staging thread
    workers.staging.client.Staging._stage
      workers.staging.client.Staging._stage_all               announce the save, then its chunks
        state.planner.Planner.divide                          cut the tensors into chunks
        workers.staging.host.stage_host                       copy chunks of the host into the ring
        workers.staging.gpu.DeviceStaging.stage               code chunks on their GPU

What becomes of the save: ``SaveOutcome``. ``restore``: see the ``restore`` package.
"""
