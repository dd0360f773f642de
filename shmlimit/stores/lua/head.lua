-- What every kind of policy shares. A script is one of the clocks, this, the kinds that it needs, and `decide` or `reset`.
--
-- A kind has `size`, how many ARGV its block takes: its name, the base of its times, the given time (high, low; empty by
-- the server's clock), cost, limit, and what it needs beside. `judge` reads a key and gives: whether the cost fits, what
-- there is (as the policy wants to be told; false for nothing), when the state has expired if it is charged (high, low),
-- and a value from which `keep` writes it. All of a policy's answer but `allowed` is worked out in Python from what there is.
local kinds = {}

local function broken(key) error('shmlimit: the state in ' .. key .. ' is broken') end

local function keep_text(key, _, value, left_ms) redis.call('SET', key, value, 'PX', left_ms) end
