"""Style: how the page looks, light and dark, on a phone and on a desk; and the policy that lets a browser take nothing else from it."""

from __future__ import annotations

import base64
import hashlib

STYLE = """
:root{color-scheme:light dark;--ground:#fbfbfa;--card:#fff;--text:#1c1e21;--quiet:#62676d;--line:#dfe1e4;--fresh:#1a7f37;--stale:#9a6700;--missing:#c4252f;--computed:#0b62b8;--accent:#0b62b8;
--fresh2:#cfe8d5;--stale2:#f3e3b8;--s0:#3b78c2;--s1:#d98b2b;--s2:#4d9a6a;--s3:#a55a9b;--s4:#c25450;--s5:#7b7f86}
@media(prefers-color-scheme:dark){:root{--ground:#121416;--card:#1b1e21;--text:#e5e7ea;--quiet:#9aa1a9;--line:#31363b;--fresh:#46b562;--stale:#d6a02b;--missing:#f2645d;--computed:#62a8f0;--accent:#62a8f0;
--fresh2:#1f3b28;--stale2:#43371a;--s0:#5b97df;--s1:#e2a24e;--s2:#64b283;--s3:#bd78b4;--s4:#dc736f;--s5:#8f949b}}
*{box-sizing:border-box}
body{margin:0;background:var(--ground);color:var(--text);font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
main,header,footer{max-width:84rem;margin:0 auto;padding:0 1rem}
header{padding-top:1.4rem}h1{font-size:1.35rem;margin:0}h2{font-size:1.05rem;margin:1.8rem 0 .6rem}h3{font-size:1rem;margin:0;overflow-wrap:anywhere}
p{margin:.25rem 0}.small{font-size:.85rem}.quiet,th,dt,summary,label,footer{color:var(--quiet)}a{color:var(--accent)}code{font-size:.92em;overflow-wrap:anywhere}
.cards{display:grid;gap:.9rem;grid-template-columns:repeat(auto-fit,minmax(min(100%,25rem),1fr))}
.card{background:var(--card);border:1px solid var(--line);border-radius:.6rem;padding:.9rem 1rem;min-width:0}
.head{display:flex;justify-content:space-between;gap:.6rem;align-items:baseline}
.word{font-weight:600;white-space:nowrap}.fresh{color:var(--fresh)}.stale{color:var(--stale)}.missing,.expired,.bad{color:var(--missing)}.computed{color:var(--computed)}
.key{display:inline-block;width:.65rem;height:.65rem;margin-right:.3rem}.legend span{white-space:nowrap;margin-right:.6rem}.found{overflow-wrap:anywhere}
svg:not(.key){display:block;width:100%;overflow:visible}svg text{fill:var(--quiet);font-size:11px}
.zone1{fill:var(--fresh2)}.zone2{fill:var(--stale2)}.mark{fill:var(--text)}.rest{fill:var(--line)}.axis{stroke:var(--line);stroke-width:1}
.f-fresh{fill:var(--fresh)}.f-stale{fill:var(--stale)}.f-missing{fill:var(--missing)}.f-computed{fill:var(--computed)}.f-other{fill:none;stroke:var(--quiet);stroke-width:1.5}
.s0{fill:var(--s0)}.s1{fill:var(--s1)}.s2{fill:var(--s2)}.s3{fill:var(--s3)}.s4{fill:var(--s4)}.s5{fill:var(--s5)}
dl{display:grid;grid-template-columns:max-content 1fr;gap:.1rem .9rem;margin:.6rem 0 0}dd{margin:0;overflow-wrap:anywhere;min-width:0}
summary{cursor:pointer;margin-top:.5rem}details[open] summary{margin-bottom:.3rem}
table{border-collapse:collapse;width:100%}th,td{text-align:left;padding:.3rem .8rem .3rem 0;border-bottom:1px solid var(--line);vertical-align:top;font-weight:400}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}td.bar{width:30%;min-width:7rem}
.ask{display:grid;gap:.9rem}form{display:flex;flex-wrap:wrap;gap:.5rem;align-items:end}label{display:block;font-size:.85rem}
select,input,button{font:inherit;color:inherit;background:var(--card);border:1px solid var(--line);border-radius:.4rem;padding:.4rem .6rem;max-width:100%}
form>div{min-width:0;max-width:100%;flex:0 1 16rem}select{width:100%}form .wide{flex:1 1 16rem}form .wide input{width:100%}button{cursor:pointer}button:hover{border-color:var(--accent)}
.answer{border-left:3px solid var(--accent);margin-top:.9rem}footer{padding:2rem 1rem;font-size:.9rem}
@media(max-width:640px){table.hits thead{display:none}table.hits tr{display:flex;flex-wrap:wrap;gap:0 .8rem;border-bottom:1px solid var(--line);padding:.4rem 0}
table.hits td{border:0;padding:0}table.hits td.bar{order:1;flex:1 0 100%}table.hits td.found{order:2}
table:not([class]) td.bar,table:not([class]) th:last-child{display:none}th,td{padding-right:.5rem}td:first-child{overflow-wrap:anywhere}.legend span{white-space:normal}
table.fold thead{display:none}table.fold tr{display:block;border-bottom:1px solid var(--line);padding:.35rem 0}
table.fold td{display:flex;justify-content:space-between;gap:1rem;border:0;padding:.1rem 0;text-align:right;white-space:normal}
table.fold td::before{content:attr(data-is);color:var(--quiet);text-align:left;white-space:nowrap}table.fold td.bar{width:auto;align-items:center}table.fold td.bar svg{flex:1;width:0}form button{flex:1 1 auto}}
""".strip()

POLICY = (
    "default-src 'none'; style-src 'sha256-"
    + base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
    + "'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
"""Content-Security-Policy of the page: no script at all, no style but this one, nothing from elsewhere."""
