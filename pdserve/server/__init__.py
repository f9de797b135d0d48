"""The router process: an OpenAI-compatible server whose every request is served by a prefill and a decode engine.

The life of a request, by module:

    gate       the path as sent, the key it needs    ──►  edge       the key's limits, caps on the body, the tenant's salt
    app        route, request id                    ──►  body       read once, bounded
    openai     parsed and validated at the edge     ──►  handoff    decides, leases, sends both legs, streams, retries, gives up
    handoff uses   admission  a pair leased, or a wait, or a refusal       legs       the two bodies
                   upstream   one HTTP exchange with an engine             frames     the decode stream, frame by frame
                   reply      what the client sees, and whether it is there
                   resume     a broken stream's rest from elsewhere
                   aborts     ends what is left on the engines             draft      the facts, until they are a receipt
    records    joins the agents' transfer records to the facts  ──►  one receipt, to metrics, log and ring

`router` holds them together, `admin` is the controller's side, `serve` the process. No engine, no Ray and no KV byte is in here.
"""
