-- The sliding counter. State: 'window previous current', where the base of times is the period.

-- Whether a / b <= c / d, for whole numbers of which the products may be beyond 2^53: by the whole parts, then by what
-- remains, upside down.
local function is_at_most(a, b, c, d)
  while true do
    local one, other = math.floor(a / b), math.floor(c / d)
    if one ~= other then return one < other end
    a, c = a - one * b, c - other * d
    if a == 0 then return true end
    if c == 0 then return false end
    a, b, c, d = d, c, b, a
  end
end

kinds['sliding-counter'] = {
  size = 6,
  judge = function(key, at, high, low)
    local seen = redis.call('GET', key)
    local base, previous, current = ARGV[at + 2] + 0, 0, 0
    local left = base - low
    if seen then
      local window, before, counted = string.match(seen, '^(%d+) (%d+) (%d+)$')
      if not window then broken(key) end
      window = window + 0
      if window > high then left = base end -- the clock went back: as of the window's start
      if window >= high then
        high, previous, current = window, before + 0, counted + 0
      elseif window == high - 1 then
        previous = counted + 0
      end
    end
    -- The previous hits weigh ceil(previous * left / base), and may weigh `room`.
    local room = ARGV[at + 6] - ARGV[at + 5] - current
    local weight, most = previous * left, room * base
    local allowed
    if weight < 9007199254740992 or most < 9007199254740992 then
      allowed = weight <= most
    else
      allowed = is_at_most(left, base, room, previous)
    end
    current = current + ARGV[at + 5]
    return allowed, seen, high + 2, 0, string.format('%.0f %.0f %.0f', high, previous, current)
  end,
  keep = keep_text,
}
