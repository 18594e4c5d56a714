"""What DeepSpeed's checkpoints share: tags and files, the states in them, flat partitions, tensor parallelism.

``tags`` finds the folder of one step and its files, ``states`` reads one file, ``flat`` says which elements of which
parameter each rank's flat partition holds, ``tensor_parallel`` where a rank's shard lies in the full tensor, and
``assembly`` turns all of it into a ``Checkpoint``. Optimizer state other than the fp32 weights is never touched.
Sources: DeepSpeed 0.19.8 ``runtime/engine.py``, ``runtime/zero/``, ``utils/zero_to_fp32.py``, ``checkpoint/``.
"""
