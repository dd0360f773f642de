-- The time: the server's own, so that hosts with other clocks agree. Nothing is remembered of what was forgotten.
--
-- Times are a pair (high, low) in a policy's own base: high * base + low microseconds, with low < base. Lua's numbers
-- are doubles, whole up to 2^53, and so is each half; a difference of two times is exact wherever it is compared with
-- something below 2^53, since rounding keeps the order.
local keys_each = 1
local spare_ms = 5 -- a key outlives its state by this, for the milliseconds and the caching in the server's own clock
local now = redis.call('TIME')
local now_us = now[1] * 1000000 + now[2]
local now_text = now[1] .. ' ' .. now[2] .. ' '

local function time(_, base)
  local high = math.floor(now_us / base)
  return high, now_us - high * base
end

local function time_text() return now_text end

local function remember() end
