-- The generic cell rate algorithm. State: the arrival time as 'seconds microseconds numerator', the last in 1/limit of a
-- microsecond. The base of times is a second.
--
-- ARGV after the head of a block: how far ahead the arrival time may be (whole microseconds, numerator) for the cost to
-- fit, and how far the cost moves it (the same two).
kinds.gcra = {
  size = 10,
  judge = function(key, at, high, low)
    local seen = redis.call('GET', key)
    local ahead, part = 0, 0
    if seen then
      local seconds, us, numerator = string.match(seen, '^(%d+) (%d+) (%d+)$')
      if not seconds then broken(key) end
      ahead, part = (seconds - high) * 1000000 + (us - low), numerator + 0
      if ahead < 0 then ahead, part = 0, 0 end
    end
    local room = ARGV[at + 7] + 0
    local allowed = ahead < room or ahead == room and part <= ARGV[at + 8] + 0
    if allowed then
      ahead, part = ahead + ARGV[at + 9], part + ARGV[at + 10]
      local limit = ARGV[at + 6] + 0
      if part >= limit then ahead, part = ahead + 1, part - limit end
    end
    local seconds = math.floor((low + ahead) / 1000000)
    local us = low + ahead - seconds * 1000000
    seconds = seconds + high
    return allowed, seen, seconds, part > 0 and us + 1 or us, seconds .. ' ' .. us .. ' ' .. part
  end,
  keep = keep_text,
}
