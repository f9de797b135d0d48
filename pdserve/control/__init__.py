"""The controller: observe → plan → apply, once per tick.

    observe (`loop`)            plan (`plan`, pure)                 apply (`loop`)
    fleet.snapshot()       →    PENDING → PLACED → LOADING     →    fleet.start()
    agent status           →    WARMING: peers, links, canary  →    agent.put_peers(), router.canary()
    router process         →    READY; phase of the whole      →    router.put_fleet(), router process restart

`observation` and `actions` are the values in and out; `workers` and `peers` hold the two halves of the decision; `folder` and `state` are what
other processes of this host can read. Knows ports only: no Ray, no engine, no command line.
"""
