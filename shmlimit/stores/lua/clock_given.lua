-- The time: what the caller gave, in the policy's own base (see clock_server.lua for the pairs).
--
-- The server forgets by its own clock, which has nothing to do with the caller's. So beside the states of a policy there
-- is a mark: steps of (server time in ms at which a key goes, when its state expired by the caller's clock), both rising.
-- A key that isn't there may be one that went, and is never judged as of a time before the latest step that has come.
local keys_each = 2
local spare_ms = 60000 -- the caller's clock may stand still for a while
local mark_ms = 2592000000 -- 30 days after the last charge of the policy with a given time
local most_steps = 32
local now = redis.call('TIME')
local now_ms = now[1] * 1000 + math.floor(now[2] / 1000)

local function steps_of(mark)
  local steps = {}
  for at, high, low in string.gmatch(redis.call('GET', mark) or '', '(%d+) (%d+) (%d+)') do
    steps[#steps + 1] = { at + 0, high + 0, low + 0 }
  end
  return steps
end

local function is_later(step, high, low, base) return (step[2] - high) * base + (step[3] - low) > 0 end

local function time(i, base, at)
  local high, low = ARGV[at + 3] + 0, ARGV[at + 4] + 0
  if redis.call('EXISTS', KEYS[2 * i - 1]) == 0 then
    for _, step in ipairs(steps_of(KEYS[2 * i])) do
      if step[1] <= now_ms and is_later(step, high, low, base) then high, low = step[2], step[3] end
    end
  end
  return high, low
end

local function time_text(high, low) return string.format('%.0f %.0f ', high, low) end

-- A state that has expired at (high, low), and whose key goes in `left_ms`, becomes a step.
local function remember(i, base, high, low, left_ms)
  local mark = KEYS[2 * i]
  local steps, kept = steps_of(mark), {}
  steps[#steps + 1] = { now_ms + left_ms - 10, high, low } -- a little early: the server counts its milliseconds otherwise
  table.sort(steps, function(one, other) return one[1] < other[1] end)
  for _, step in ipairs(steps) do
    local before = kept[#kept]
    if not before then
      kept[1] = step
    elseif is_later(step, before[2], before[3], base) then -- else it counts for nothing beside the one before
      local takes_its_place = step[1] <= now_ms or step[1] == before[1]
      kept[takes_its_place and #kept or #kept + 1] = step
    end
  end
  while #kept > most_steps do -- the two that are nearest become one, that comes with the first and counts as the second
    local nearest = 2
    for number = 3, #kept do
      if kept[number][1] - kept[number - 1][1] < kept[nearest][1] - kept[nearest - 1][1] then nearest = number end
    end
    kept[nearest][1] = kept[nearest - 1][1]
    table.remove(kept, nearest - 1)
  end
  for number, step in ipairs(kept) do kept[number] = string.format('%.0f %.0f %.0f', step[1], step[2], step[3]) end
  redis.call('SET', mark, table.concat(kept, ','), 'PX', mark_ms + left_ms)
end
