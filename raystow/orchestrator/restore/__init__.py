"""Fills a training state from a version: which version, what is read from where, and where it goes.

The call path from ``Checkpointer.restore`` to the elements of a tensor in ``into``::

    orchestrator.client.checkpointer.Checkpointer.restore
      orchestrator.client.restores.Restores.run               the vote of this rank
        orchestrator.restore.agreed.restore_agreed            fall back past damaged versions
          orchestrator.restore.agreement.ClusterAgreement.settle  agree on a version with the other ranks
          orchestrator.restore.planner.plan_restore           compare ``into`` with the version's manifest
            state.tree.flatten                                ``into`` as a list of leaves
            state.shards.shard_of                             the part of each tensor that this rank has, in its memory
            storage.versions.tensor_index.Finder.find         the chunks that overlap these parts
            orchestrator.restore.name_match.match_names       the names that both sides have
            orchestrator.restore.fill.Fill.add                one request for each tensor
            storage.versions.reader.PackReader.runs           the ranges of packs to fetch for the requests
          orchestrator.restore.fill.Fill.run                  (``RestorePlan.execute``)
            storage.versions.reader.PackReader.complete       fetch, check and decode into the memory of the tensors
"""
