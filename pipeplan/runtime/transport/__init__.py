"""Messages between ranks: who is where, what carries a message, when it has arrived.

`base` says what the executor asks of a transport; `gloo` and `nccl` are the two that a training
uses. Small messages of one machine take `local_socket`.
"""
