"""The style sheet and the sorting script of every report, inline in the page."""

STYLE = """
:root{color-scheme:light dark;--bg:#fbfbf9;--card:#fff;--ink:#1d1f23;--soft:#5c6068;--line:#e3e3de;--accent:#5b7fbd;
--code:#f1f1ec;--shade:rgba(0,0,0,.035)}
@media (prefers-color-scheme:dark){:root{--bg:#121316;--card:#1a1c20;--ink:#e8e8e4;--soft:#9ea2aa;--line:#30333a;
--accent:#8aaae0;--code:#22252a;--shade:rgba(255,255,255,.045)}}
*{box-sizing:border-box}
html{scroll-behavior:smooth;scroll-padding-top:3.4rem}
body{margin:0;background:var(--bg);color:var(--ink);font:16px/1.55 system-ui,-apple-system,"Segoe UI",Inter,Roboto,
"Helvetica Neue",Arial,sans-serif;-webkit-font-smoothing:antialiased}
header,main{max-width:1180px;margin:0 auto;padding:0 1.5rem}
header{padding-top:3.2rem;padding-bottom:1.4rem}
h1{font-size:2.35rem;line-height:1.12;letter-spacing:-.022em;margin:0 0 .5rem;font-weight:680;text-wrap:balance}
header>p{font-size:1.13rem;color:var(--soft);max-width:46rem;margin:0 0 1.5rem}
nav{position:sticky;top:0;z-index:5;background:color-mix(in srgb,var(--bg) 88%,transparent);backdrop-filter:blur(8px);
border-block:1px solid var(--line);display:flex;flex-wrap:wrap;gap:.15rem 1.3rem;justify-content:center;
padding:.55rem 1.5rem;font-size:.86rem}
nav a{color:var(--soft);text-decoration:none}nav a:hover{color:var(--ink)}
section{padding:2.6rem 0 1.2rem;border-bottom:1px solid var(--line)}section:last-child{border:0}
h2{font-size:1.5rem;letter-spacing:-.014em;margin:0 0 .35rem;font-weight:660}
h3{font-size:.95rem;margin:0 0 .4rem;font-weight:620}
p{max-width:46rem;margin:.4rem 0 .8rem}.lead{font-size:1.04rem;color:var(--soft);margin-bottom:1.4rem;max-width:50rem}
.caption,figcaption{font-size:.84rem;color:var(--soft);line-height:1.45;margin:.5rem 0 0}
code,pre{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;font-size:.86em}
code{background:var(--code);padding:.08em .35em;border-radius:4px}
pre{background:var(--code);padding:.8rem 1rem;border-radius:8px;overflow-x:auto;line-height:1.45;margin:.5rem 0;
font-size:.8rem}
dl{margin:0}dd{margin:0}
.facts{display:flex;flex-wrap:wrap;gap:.8rem 2rem}
.facts dt{font-size:.74rem;text-transform:uppercase;letter-spacing:.06em;color:var(--soft)}
.facts dd{font-size:1rem;font-weight:600;font-variant-numeric:tabular-nums}
.terms{display:grid;grid-template-columns:repeat(auto-fit,minmax(300px,1fr));gap:1rem 2rem;margin:.2rem 0 1rem}
.terms dt{font-weight:640;margin-bottom:.1rem}.terms dd{color:var(--soft);font-size:.94rem}
.grid{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(var(--min),100%),1fr));gap:1rem;margin:1rem 0}
figure{margin:1rem 0;background:var(--card);border:1px solid var(--line);border-radius:12px;padding:1rem 1.1rem 1rem}
.grid figure{margin:0;padding:.8rem .85rem .7rem}.grid h3{font-size:.83rem;white-space:nowrap;overflow:hidden;
text-overflow:ellipsis}
svg,figure img{display:block;width:100%;height:auto;color:var(--ink);overflow:visible}
svg image{image-rendering:pixelated}svg text{fill:currentColor}
.dot{display:inline-block;width:.62em;height:.62em;border-radius:50%;margin-right:.5em}
.scroll{overflow-x:auto;border:1px solid var(--line);border-radius:12px;background:var(--card);margin:1rem 0 .3rem}
table{border-collapse:collapse;width:100%;font-size:.87rem;font-variant-numeric:tabular-nums}
th,td{padding:.46rem .7rem;text-align:left;white-space:nowrap;border-bottom:1px solid var(--line)}
td:not(.number):not(:first-child){white-space:normal}
tbody tr:last-child td{border-bottom:0}tbody tr:hover{background:var(--shade)}
.number,th.right{text-align:right}td:first-child,th:first-child{text-align:left}
th{font-weight:600;font-size:.78rem;color:var(--soft);vertical-align:bottom;white-space:normal;line-height:1.25}
th button{all:unset;cursor:pointer}th button:hover{color:var(--ink)}th button:focus-visible{outline:2px solid
var(--accent)}
th button{position:relative;padding-right:.95em}
th button::after{content:"";position:absolute;right:0;bottom:0;opacity:.75}
th[aria-sort=ascending] button::after{content:"▴"}th[aria-sort=descending] button::after{content:"▾"}
.bar{display:block;position:relative;isolation:isolate;min-width:5.4rem}
.bar::before{content:"";position:absolute;z-index:-1;inset:-.12rem 0 -.12rem auto;width:var(--w);background:var(--c);
opacity:.22;border-radius:3px}
td b{font-weight:720}
details{border:1px solid var(--line);border-radius:10px;background:var(--card);margin:.55rem 0;padding:.55rem .95rem}
summary{cursor:pointer;font-weight:500}details[open] summary{margin-bottom:.4rem}
@media (max-width:760px){nav{position:static}}
@media print{nav{display:none}figure,.scroll{break-inside:avoid}}
"""

SCRIPT = """
for (const table of document.querySelectorAll('table.sortable')) {
  const body = table.tBodies[0];
  [...table.tHead.rows[0].cells].forEach((head, place) => {
    const cells = () => [...body.rows].map(row => row.cells[place]);
    const numbers = cells().some(cell => cell.hasAttribute('data-sort'));
    if (numbers) head.classList.add('right');
    head.querySelector('button').addEventListener('click', () => {
      const up = head.getAttribute('aria-sort') !== 'ascending';
      for (const other of head.parentElement.cells) other.removeAttribute('aria-sort');
      head.setAttribute('aria-sort', up ? 'ascending' : 'descending');
      const key = row => {
        const cell = row.cells[place];
        if (!numbers) return cell.textContent;
        const text = cell.getAttribute('data-sort');
        return text === null || text === '' ? NaN : Number(text === 'inf' ? Infinity : text);
      };
      const sign = up ? 1 : -1;
      const rows = [...body.rows].sort((a, b) => {
        const x = key(a), y = key(b);
        if (!numbers) return sign * x.localeCompare(y);
        if (Number.isNaN(x) || Number.isNaN(y)) return Number.isNaN(x) - Number.isNaN(y);
        return x === y ? 0 : sign * (x < y ? -1 : 1);
      });
      body.append(...rows);
    });
  });
}
"""
