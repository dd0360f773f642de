-- The sliding log. State: a list, the oldest hit first, of 'seconds microseconds before units', where `before` is how
-- many units came before the hit (modulo 2^40): the units of a stretch are a difference, and the hits in it are not
-- looked at. The base of times is a second.
--
-- ARGV after the head of a block: the period in microseconds.
--
-- What there is is told as up to three hits that stand for all of them: the oldest, with the units of what follows up to
-- the one that has to leave for the cost to fit; that one, with all the other units; and the time of the newest.
local turn = 1099511627776

kinds['sliding-log'] = {
  size = 7,
  judge = function(key, at, high, low)
    local cost, limit, period = ARGV[at + 5] + 0, ARGV[at + 6] + 0, ARGV[at + 7] + 0

    local function hit(index)
      local text = redis.call('LINDEX', key, index)
      if not text then return nil end
      local seconds, us, before, units = string.match(text, '^(%d+) (%d+) (%d+) (%d+)$')
      if not seconds then broken(key) end
      return seconds + 0, us + 0, before + 0, units + 0
    end
    local function since(seconds, us) return (high - seconds) * 1000000 + (low - us) end

    local seconds, us, before, units = hit(-1)
    if seconds and since(seconds, us) < 0 then high, low = seconds, us end -- the clock went back: as of the newest
    local up = math.floor((low + period) / 1000000)
    local expires_high, expires_low = high + up, low + period - up * 1000000
    local value = { high = high, low = low, before = 0, units = cost, first = 0 }
    if not seconds or since(seconds, us) >= period then
      value.restarts = seconds
      return cost <= limit, seconds and '', expires_high, expires_low, value
    end
    if since(seconds, us) == 0 then
      value.merges, value.before, value.units = true, before, units + cost
    else
      value.before = (before + units) % turn
    end

    -- The first index from `from` to `to` at which a hit is as wanted; at `to` one is.
    local function search(from, to, is_wanted)
      while from < to do
        local middle = math.floor((from + to) / 2)
        if is_wanted(hit(middle)) then to = middle else from = middle + 1 end
      end
      return from
    end

    local end_of_all = before + units
    local first_seconds, first_us, first_before, first_units = hit(0)
    local last
    if since(first_seconds, first_us) >= period then
      last = redis.call('LLEN', key) - 1
      value.first = search(1, last, function(one_seconds, one_us) return since(one_seconds, one_us) < period end)
      first_seconds, first_us, first_before, first_units = hit(value.first)
    end
    local used = (end_of_all - first_before) % turn
    local over = used + cost - limit
    local seen, others = first_seconds .. ' ' .. first_us .. ' ', used
    if over > first_units then
      last = last or redis.call('LLEN', key) - 1
      local index = search(value.first + 1, last, function(_, _, one_before, one_units)
        return (one_before + one_units - first_before) % turn >= over
      end)
      local one_seconds, one_us, one_before = hit(index)
      local stretch = (one_before - first_before) % turn
      seen, others = seen .. stretch .. ' ' .. one_seconds .. ' ' .. one_us .. ' ', used - stretch
    end
    seen = seen .. others .. ' ' .. seconds .. ' ' .. us .. ' 0'
    return over <= 0, seen, expires_high, expires_low, value
  end,

  keep = function(key, _, value, left_ms)
    local entry = value.high .. ' ' .. value.low .. ' ' .. value.before .. ' ' .. value.units
    if value.restarts then redis.call('DEL', key) end
    if value.merges then redis.call('LSET', key, -1, entry) else redis.call('RPUSH', key, entry) end
    if value.first > 0 then redis.call('LTRIM', key, value.first, -1) end
    redis.call('PEXPIRE', key, left_ms)
  end,
}
