-- Forgets a key. ARGV are those of take.lua. Replies as that does: the time, and what there was.
local high, low = time(1, ARGV[3] + 0, 1)
local _, seen = kinds[ARGV[2]].judge(KEYS[1], 1, high, low)
redis.call('DEL', KEYS[1])
return { ok = '1 ' .. time_text(high, low) .. (seen or '') }
