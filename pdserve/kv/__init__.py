"""The KV transfer layer: a vLLM connector that moves a prompt's cache from a prefill engine to a decode engine, and can prove it.

The life of one transfer, all names as in the modules:

    scheduler side (engine core)          worker side (each rank)            the rank's I/O thread
    ----------------------------          -----------------------            ---------------------
    decode: ticket seen, blocks      →    receive order                 →    ReceiveLedger: OFFERED (offer to the producer ranks)
    prefill: ticket seen, blocks     →    send order                    →    SendLedger: OPEN
    prefill: chunk scheduled         →    pass and token range; layer hooks say what was written
                                                                        →    WRITING: gather a parcel into a granted slot, post it
                                                                             decode: verify, scatter, return the slot (RECEIVING)
    prefill: last chunk              →    sweep, seal                   →    SEALED: the set of writes, its count and digest, to each consumer
                                                                             decode: scattered == sealed == planned → COMPLETE, ack
    decode: request may run          ←    finished receiving            ←    LANDED
    prefill: blocks freed            ←    finished sending              ←    every consumer rank acked: RELEASED

Modules: `ticket`, `identity`, `geometry`, `plan`, `wire` are values and pure functions; `send_ledger` and `receive_ledger` are the two state
machines, sans I/O, and `closing` is what both say at the end; `slots`, `pages` and `transports/` touch bytes; `rank` is the I/O thread that drives
them, over the `links` with other ranks; `support` refuses what cannot be moved, before an engine starts; `scheduler_side`, `worker_side` and
`connector` are what vLLM sees; `engine_plugin` is what vLLM loads.

This room knows nothing of Ray, HTTP, or the router: addresses come from the peer table, rights from the ticket.
"""
